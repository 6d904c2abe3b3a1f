"""Where an etcd is and how it is spoken to, read from a URL and the environment.

    etcd://HOST[:PORT][,HOST...][/CLUSTER][?ca=FILE&cert=FILE&key=FILE]

`etcds` means TLS, with the system's authorities unless `ca` names others. CLUSTER tells several pools on one etcd
apart. The user and the password come from the environment alone: a command line can be read by everybody on the
machine.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from kvstore.errors import BadSetting

USER_VARIABLE = "ETCD_USERNAME"
PASSWORD_VARIABLE = "ETCD_PASSWORD"  # noqa: S105 - a name
DEFAULT_PORT = 2379
_OPTIONS = {"ca", "cert", "key"}
_CLUSTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_EXAMPLE = "write etcd://HOST:2379 or etcds://HOST:2379,HOST:2379/CLUSTER?ca=FILE"


@dataclass(frozen=True, slots=True)
class EtcdPlace:
    """See the module's docstring."""

    endpoints: tuple[str, ...]
    cluster: str = "default"
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: str = ""
    password: str = field(default="", repr=False)

    @property
    def prefix(self) -> str:
        """What all keys of this pool begin with."""
        return f"/kvstored/{self.cluster}/"

    @staticmethod
    def read(url: str, environ: Mapping[str, str] = os.environ) -> EtcdPlace:
        """Return what a URL says.

        Raises
        ------
        BadSetting
            It can't be read, holds a password, or names an option that there is not.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("etcd", "etcds") or not parts.netloc:
            raise BadSetting(f"{_without_password(url)!r} is no address of an etcd: {_EXAMPLE}")
        if "@" in parts.netloc:
            raise BadSetting(
                f"{_without_password(url)!r} holds a user: set {USER_VARIABLE} and {PASSWORD_VARIABLE} in the "
                "daemon's environment, since everybody on the machine can read its command line"
            )
        options = parse_qs(parts.query, keep_blank_values=True)
        if unknown := set(options) - _OPTIONS:
            raise BadSetting(f"{url!r} has options {sorted(unknown)}: there are {', '.join(sorted(_OPTIONS))}")
        tls = parts.scheme == "etcds"
        if options and not tls:
            raise BadSetting(f"{url!r} names certificates, which etcd:// has no use for: write etcds://")
        cluster = parts.path.strip("/") or "default"
        if not _CLUSTER.fullmatch(cluster):
            raise BadSetting(f"{cluster!r} is no name of a cluster: use letters, digits, dots, - and _, 64 at most")
        files = {name: Path(values[-1]) for name, values in options.items()}
        if ("cert" in files) != ("key" in files):
            raise BadSetting(f"{url!r} names a certificate or a key without the other: give both")
        user, password = environ.get(USER_VARIABLE, ""), environ.get(PASSWORD_VARIABLE, "")
        if bool(user) != bool(password):
            raise BadSetting(f"one of {USER_VARIABLE} and {PASSWORD_VARIABLE} is set: set both or none")
        endpoints = tuple(_endpoint(text, url) for text in parts.netloc.split(","))
        return EtcdPlace(endpoints, cluster, tls=tls, user=user, password=password, **files)

    def base_url(self, number: int) -> str:
        """Return the address of one of the endpoints."""
        return f"{'https' if self.tls else 'http'}://{self.endpoints[number]}"

    def tls_context(self) -> ssl.SSLContext:
        """Return what TLS connections are made with.

        Raises
        ------
        BadSetting
            A file can't be read or is no certificate.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None and self.key is not None:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as exc:
            files = ", ".join(str(path) for path in (self.ca, self.cert, self.key) if path is not None)
            raise BadSetting(f"the certificates for etcd ({files}) can't be used: {exc}") from exc
        return context


def _endpoint(text: str, url: str) -> str:
    """Return HOST:PORT of one server."""
    split = urlsplit(f"//{text}")
    try:
        port = split.port or DEFAULT_PORT
    except ValueError as exc:
        raise BadSetting(f"{text!r} in {url!r} has no port up to 65535: {_EXAMPLE}") from exc
    host = split.hostname
    if not host or split.path:
        raise BadSetting(f"{text!r} in {url!r} is no host: {_EXAMPLE}")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _without_password(url: str) -> str:
    """Return a URL without what stands before its @."""
    return re.sub(r"//[^/@]*@", "//...@", url)
