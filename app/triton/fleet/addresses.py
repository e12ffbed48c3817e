"""The addresses of ``GATEWAY_TRITON_URL``: a fixed list, or one DNS name, whose addresses are followed."""

import ipaddress


def addresses_of(url: str) -> tuple[str, ...]:
    """Splits addresses separated by commas: ``host:port`` or ``unix:/path``. Raises ValueError."""
    found = tuple(dict.fromkeys(part.strip() for part in url.split(",")))
    for address in found:
        if not address.startswith("unix:"):
            host_and_port(address)
        elif address == "unix:":
            raise ValueError("a path must follow `unix:`")
    return found


def is_name(address: str) -> bool:
    """Whether the address is a DNS name that may have several IP addresses. ``localhost`` is not."""
    if address.startswith("unix:"):
        return False
    host, _ = host_and_port(address)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


def host_and_port(address: str) -> tuple[str, int]:
    """Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"'{address[:100]}' is not an address; expected host:port or unix:/path")
    return host.strip("[]"), int(port)
