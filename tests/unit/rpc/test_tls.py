"""TLS: which versions, which files, certificates that change, and who shows which."""

from __future__ import annotations

import os
import ssl
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography.x509.oid import NameOID

from persist.client.arguments import ClientTls
from persist.core.errors import InvalidUsage
from rpc.settings import ServerSettings
from rpc.tls import LOOK_AGAIN_S, TlsContext, TlsFiles, checked_name, context_of, names_of, peer_of
from tests.support.certificates import Authority, subject_of


class Place:
    """The files of a server, and a clock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority("ours")
        self.ca = self.authority.file(directory / "ca.pem")
        self.now_s = 1000.0
        self.write()

    def write(self) -> None:
        certificate, key = self.authority.signed("DNS:server.test")
        (self.directory / "cert.pem").write_bytes(certificate)
        (self.directory / "key.pem").write_bytes(key)

    def files(self, client_ca: str | None = None) -> TlsFiles:
        return TlsFiles(str(self.directory / "cert.pem"), str(self.directory / "key.pem"), client_ca)

    def context(self, client_ca: str | None = None) -> TlsContext:
        return TlsContext(self.files(client_ca), lambda: self.now_s)

    def client(self, certificate_file: str | None = None) -> ssl.SSLContext:
        return ClientTls(self.ca, certificate_file).context()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


class Connection:
    """A handshake in memory. Raises ssl.SSLError, of whichever side refuses."""

    def __init__(self, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.server = server.wrap_bio(to_server, to_client, server_side=True)
        self.client = client.wrap_bio(to_client, to_server, server_hostname="server.test")
        for _ in range(4):
            for side in (self.client, self.server):
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()

    def serial(self) -> str:
        shown = self.client.getpeercert()
        assert shown is not None
        return str(shown["serialNumber"])

    def get_extra_info(self, name: str) -> object:
        """As a transport tells it."""
        assert name == "peercert"
        return self.server.getpeercert()


@pytest.mark.parametrize(("version", "is_good"), [("TLSv1_1", False), ("TLSv1_2", True), ("TLSv1_3", True)])
def test_no_version_before_1_2_is_spoken(place: Place, version: str, is_good: bool) -> None:
    client = place.client()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client.set_ciphers("ALL:@SECLEVEL=0")  # so that the client itself would speak older ones
        client.minimum_version = ssl.TLSVersion.TLSv1_1
        client.maximum_version = ssl.TLSVersion[version]
    if is_good:
        assert Connection(place.context(), client).client.version() == version.replace("_", ".").replace("v1.", "v1.")
    else:
        with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
            Connection(place.context(), client)


def test_a_new_connection_gets_the_new_certificate_and_an_old_one_keeps_its_own(place: Place) -> None:
    context, client = place.context(), place.client()
    old = Connection(context, client)
    place.write()
    assert Connection(context, client).serial() == old.serial()  # it is looked at now and then only
    place.now_s += LOOK_AGAIN_S
    new = Connection(context, client)
    assert new.serial() != old.serial()
    assert old.server.getpeercert() is None
    old.server.write(b"still here")


def test_files_that_cannot_be_used_leave_the_last_good_ones(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    context, client = place.context(), place.client()
    first = Connection(context, client).serial()
    certificate, key = place.authority.signed("DNS:server.test")
    cert_file, key_file = place.directory / "cert.pem", place.directory / "key.pem"
    good = key_file.read_bytes()

    def broken() -> None:
        place.now_s += LOOK_AGAIN_S
        caplog.clear()
        assert Connection(context, client).serial() == first
        assert "still use the last valid certificate" in caplog.text

    cert_file.write_bytes(certificate)  # its key has not come yet
    broken()
    cert_file.write_bytes(certificate[: len(certificate) // 2])
    broken()
    cert_file.unlink()
    broken()
    os.mkfifo(cert_file)  # it would be waited for
    broken()
    cert_file.unlink()
    cert_file.write_bytes(certificate)
    key_file.write_bytes(key)
    assert good != key
    place.now_s += LOOK_AGAIN_S
    assert Connection(context, client).serial() != first


def test_who_signs_clients_may_change_too(place: Place) -> None:
    theirs = Authority("theirs")
    signers = place.authority.file(place.directory / "signers.pem")
    context = place.context(signers)
    ours = place.client(place.authority.client(place.directory / "ours.pem", "DNS:ours.test"))
    other = place.client(theirs.client(place.directory / "theirs.pem", "DNS:theirs.test"))
    assert peer_of(Connection(context, ours)) is not None
    with pytest.raises(ssl.SSLError):
        Connection(context, other)
    theirs.file(place.directory / "signers.pem")
    place.now_s += LOOK_AGAIN_S
    assert peer_of(Connection(context, other)) is not None
    with pytest.raises(ssl.SSLError):
        Connection(context, ours)


def test_a_client_is_known_by_all_its_names_or_by_none(place: Place) -> None:
    context = place.context(place.ca)
    subject = subject_of((NameOID.COMMON_NAME, "etl,O=Evil"), (NameOID.ORGANIZATION_NAME, "Example"))
    shown = place.authority.client(
        place.directory / "c.pem",
        "DNS:ETL.test",
        "URI:spiffe://x/etl",
        "email:a@b.test",
        "IP:10.0.0.1",
        subject=subject,
    )
    peer = peer_of(Connection(context, place.client(shown)))
    assert peer is not None
    assert peer.names == {
        "DNS:etl.test", "URI:spiffe://x/etl", "email:a@b.test", "IP:10.0.0.1", r"subject:CN=etl\,O\=Evil,O=Example"
    }  # fmt: skip
    assert peer_of(Connection(context, place.client())) is None
    assert peer_of(Connection(place.context(), place.client(shown))) is None  # it is not asked for


def test_parts_of_a_subject_that_stand_together_are_told_together() -> None:
    both = ((("commonName", "a"), ("userId", "b+c")), (("1.2.3", "d"),))
    assert names_of({"subject": both}) == [r"subject:CN=a+UID=b\+c,1.2.3=d"]
    assert names_of({}) == []


def test_a_certificate_that_has_expired_is_refused(place: Place) -> None:
    path = place.directory / "old.pem"
    path.write_bytes(b"".join(place.authority.signed("DNS:old.test", days=-1)))
    with pytest.raises(ssl.SSLError):
        Connection(place.context(place.ca), place.client(str(path)))


@pytest.mark.parametrize("name", ["", "etl", "DNS:", "CN=etl", "DNS:a\nb", "dns:a", 7, None, "URI:" + "x" * 1001])
def test_what_is_no_name(name: object) -> None:
    with pytest.raises(ValueError, match="certificate is DNS"):
        checked_name(name)


def test_a_host_has_no_case() -> None:
    assert checked_name("DNS:ETL.Example") == "DNS:etl.example"
    assert checked_name("URI:spiffe://X") == "URI:spiffe://X"


@pytest.mark.parametrize("content", [b"", b"-----BEGIN CERTIFICATE-----\n", None])
@pytest.mark.parametrize("which", ["certificate", "key", "client_ca"])
def test_a_server_does_not_start_with_files_that_cannot_be_used(
    place: Place, which: str, content: bytes | None
) -> None:
    bad = place.directory / "bad.pem"
    if content is not None:
        bad.write_bytes(content)
    good = place.files(place.ca)
    files = TlsFiles(**{name: getattr(good, name) for name in ("certificate", "key", "client_ca")} | {which: str(bad)})
    with pytest.raises(InvalidUsage, match=r"the TLS files .*bad\.pem"):
        context_of(files)
    settings = ServerSettings(
        tls_certificate=files.certificate, tls_key=files.key, tls_client_ca=files.client_ca, tokens_file="t.json"
    )
    with pytest.raises(InvalidUsage, match=r"the TLS files .*bad\.pem"):
        settings.check()


def test_certificates_of_clients_need_what_says_what_each_may_do(place: Place) -> None:
    files = place.files()
    for tokens, certificate in ((None, files.certificate), ("t.json", None)):
        settings = ServerSettings(
            tls_certificate=certificate, tls_key=certificate and files.key, tls_client_ca=place.ca, tokens_file=tokens
        )
        with pytest.raises(InvalidUsage, match="a tokens file"):
            settings.check()


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(place: Place) -> None:
    from cryptography.hazmat.primitives import serialization as s

    key = s.load_pem_private_key((place.directory / "key.pem").read_bytes(), None)
    locked = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"passphrase"))
    both = place.directory / "both.pem"
    both.write_bytes((place.directory / "cert.pem").read_bytes() + locked)
    (place.directory / "key.pem").write_bytes(locked)
    with pytest.raises(InvalidUsage, match="or the key has a passphrase: write it without one"):
        context_of(place.files())
    with pytest.raises(InvalidUsage, match=r"certificate_file .* has a passphrase"):
        ClientTls(None, str(both)).context()
    with pytest.raises(InvalidUsage, match="no regular file"):
        ClientTls(None, str(place.directory)).context()


def test_a_key_of_another_certificate_is_told_as_that(place: Place) -> None:
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import ec

    other = ec.generate_private_key(ec.SECP256R1())
    data = other.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    (place.directory / "key.pem").write_bytes(data)
    with pytest.raises(InvalidUsage, match=r"the key is not that of the certificate|another type"):
        context_of(place.files())


@pytest.mark.parametrize(("given", "of_certificate"), [
    ("IP:2001:db8::1", "2001:DB8:0:0:0:0:0:1"),
    ("IP:2001:DB8:0:0:0:0:0:1", "2001:DB8:0:0:0:0:0:1"),
    ("IP:10.0.0.7", "10.0.0.7"),
    ("IP:::ffff:10.0.0.7", "0:0:0:0:0:FFFF:A00:7"),
    ("IP:::1", "0:0:0:0:0:0:0:1\n"),
    ("IP:<invalid>", "<invalid>"),
])  # fmt: skip
def test_an_address_in_a_certificate_had_another_spelling_than_in_the_file(given: str, of_certificate: str) -> None:
    assert names_of({"subjectAltName": (("IP Address", of_certificate),)}) == [checked_name(given)]
