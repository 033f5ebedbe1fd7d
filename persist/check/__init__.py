"""What a location suffers from: one sentence a finding, with its cause and its remedy. Nothing is written for it."""
