"""How near to the limit of the machine: every path beside the least that it could take."""
