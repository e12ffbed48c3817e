"""Divides the limits of the gateway among its workers."""

from app.settings import Settings, SettingsError

SHARED_OUT = ("max_connections", "max_bytes_in_flight", "max_kept_bytes", "max_kept_streams")
"""Settings that are totals for all workers."""


def check_shares(settings: Settings) -> None:
    """Raises SettingsError if a worker's share of a limit is too small."""
    workers = settings.workers
    if settings.max_connections < workers:
        raise SettingsError(
            f"GATEWAY_MAX_CONNECTIONS is {settings.max_connections}: each of the {workers} workers needs one"
        )
    if settings.max_kept_streams < workers:
        raise SettingsError(
            f"GATEWAY_MAX_KEPT_STREAMS is {settings.max_kept_streams}: each of the {workers} workers needs one"
        )
    share = settings.max_bytes_in_flight // workers
    if share < settings.max_body_bytes <= settings.max_bytes_in_flight:
        raise SettingsError(
            f"GATEWAY_MAX_BYTES_IN_FLIGHT gives each of the {workers} workers {share} bytes, less than "
            f"GATEWAY_MAX_BODY_BYTES, {settings.max_body_bytes}: no worker could accept the largest body"
        )


def settings_of_worker(settings: Settings, number: int) -> Settings:
    """``number``: from 1. The shares of all workers add up to the total."""
    shares = {name: _share(getattr(settings, name), number, settings.workers) for name in SHARED_OUT}
    if settings.shared_memory_limit:
        shares["shared_memory_bytes"] = _share(settings.shared_memory_limit, number, settings.workers)
    return settings.model_copy(update=shares)


def _share(total: int, number: int, workers: int) -> int:
    return total // workers + (number <= total % workers)
