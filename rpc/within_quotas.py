"""What a server commits in somebody's name counts in their quota of bytes, as what they commit by themselves does."""

from __future__ import annotations

from persist.client.transport import AsCaller, Transport
from persist.core import commands as c
from persist.core.errors import Indeterminate, PersistError
from persist.core.recorded import NOBODY, Caller
from rpc.admitting import brings_rows, frees, parts_of
from rpc.auth import Principal
from rpc.quotas import Quotas


class WithinQuotas(AsCaller):
    """A transport for who asks through a server, within their quota of bytes. Others were counted as they came in."""

    def __init__(self, inner: Transport, caller: Caller, quotas: Quotas, principal: Principal) -> None:
        super().__init__(inner, caller)
        self._quotas = quotas
        self._principal = principal

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        """Also raises QuotaFull, before anything is committed."""
        if not brings_rows(command):
            return super().apply(name, command, caller)
        size = sum(part.size for part in parts_of(command))
        give_back = self._quotas.adds(self._principal, name, "bytes", size, frees=frees(command))
        try:
            return super().apply(name, command, caller)
        except Indeterminate:
            raise
        except PersistError:
            give_back()
            raise
