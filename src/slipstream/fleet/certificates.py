"""A private certificate authority for mutual TLS between gateway and replicas (`tls: auto`).

The authority signs one certificate for the gateway and one for the replicas. Its key is dropped as
soon as both are signed, so no further certificate can be issued. Every replica's certificate is for
the name `replica`, whatever its address."""

from __future__ import annotations

import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path

from slipstream.base.files import open_new
from slipstream.errors import ConfigError, install_command
from slipstream.fleet.config import Tls

_DAYS = 3650  # longer than any fleet runs: the certificates are deleted with its folder


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Paths of PEM files: the authority, and certificate and key of the gateway and of the
    replicas."""

    ca: str
    gateway: tuple[str, str]
    replica: tuple[str, str]

    def context(self) -> ssl.SSLContext:
        """TLS context for the gateway's connections to replicas."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            context.load_cert_chain(*self.gateway)
        except OSError as error:
            raise ConfigError(f"the TLS files cannot be used: {error}", field="tls") from None
        return context


def given(tls: Tls) -> CertificateFiles:
    """Use one certificate from the user for both sides. It must be valid for the name `replica`."""
    assert tls.ca
    assert tls.certificate
    assert tls.key
    pair = tls.certificate, tls.key
    return CertificateFiles(tls.ca, pair, pair)


def make(folder: Path) -> CertificateFiles:
    """Make new certificates, in files that only this user can read."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise ConfigError(
            f"tls: auto needs cryptography: {install_command('fleet')}", field="tls"
        ) from None

    now = datetime.datetime.now(datetime.UTC)

    def sign(
        name: str,
        key: ec.EllipticCurvePrivateKey,
        issuer: str,
        by: ec.EllipticCurvePrivateKey,
        *,
        is_ca: bool,
    ) -> bytes:
        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        builder = (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))  # tolerates clocks that differ
            .not_valid_after(now + datetime.timedelta(days=_DAYS))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False
            )
        )
        if not is_ca:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False
            )
        else:
            usage = dict.fromkeys(
                (
                    *(
                        "digital_signature",
                        "content_commitment",
                        "key_encipherment",
                        "data_encipherment",
                    ),
                    *("key_agreement", "encipher_only", "decipher_only"),
                ),
                False,
            )
            builder = builder.add_extension(
                x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True
            )
        return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def keep(name: str, data: bytes) -> str:
        path = folder / name
        with open(open_new(path, 0o600), "wb") as file:
            file.write(data)
        return str(path)

    authority = ec.generate_private_key(ec.SECP256R1())
    ca = keep(
        "ca.pem", sign("slipstream fleet", authority, "slipstream fleet", authority, is_ca=True)
    )
    pairs = []
    for name in ("gateway", "replica"):
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        certificate = sign(name, key, "slipstream fleet", authority, is_ca=False)
        pairs.append((keep(f"{name}.pem", certificate), keep(f"{name}-key.pem", pem)))
    return CertificateFiles(ca, pairs[0], pairs[1])
