"""Hosts that always mean this machine."""

import ipaddress


def is_loopback(host: str) -> bool:
    """``host``: a name or an address without port and brackets. Names are not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
