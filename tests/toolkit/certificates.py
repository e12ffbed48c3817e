"""Certificates of a test authority, as files."""

from dataclasses import dataclass
from pathlib import Path

import grpc
import trustme

from app.triton.credentials import TlsFiles


@dataclass
class Authority:
    folder: Path

    def __post_init__(self) -> None:
        self._authority = trustme.CA()
        self.path = self.folder / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.path))

    def issue(self, *names: str, **more: object) -> trustme.LeafCert:
        return self._authority.issue_cert(*names, **more)  # type: ignore[arg-type]

    def files(self, *names: str) -> TlsFiles:
        """Returns the files of a client that trusts this authority. With names, the client also has a certificate."""
        if not names:
            return TlsFiles(self.path)
        certificate, key = self.folder / "client.pem", self.folder / "client.key"
        issued = self.issue(*names)
        certificate.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key))
        return TlsFiles(self.path, certificate, key)

    def server(self, *names: str, asks_for_client: bool = False, **more: object) -> grpc.ServerCredentials:
        """``asks_for_client`` turns on mutual TLS."""
        issued = self.issue(*names, **more)
        pair = (issued.private_key_pem.bytes(), b"".join(each.bytes() for each in issued.cert_chain_pems))
        root = self.path.read_bytes() if asks_for_client else None
        return grpc.ssl_server_credentials([pair], root, asks_for_client)
