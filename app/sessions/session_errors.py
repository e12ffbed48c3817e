"""The errors of sessions and their steps. ``app/api/sessions/session_layer.py`` has their HTTP statuses."""

from app.core.errors import ClientError, GatewayError, Outcome


class HttpSessionsOff(ClientError, code="http_sessions_off", title="Sessions over HTTP are off"): ...


class UnknownSession(ClientError, code="unknown_session", title="No such session"): ...


class StepOutOfTurn(ClientError, code="step_out_of_turn", title="The step is out of turn"):
    """``last_step``: the number of the last step that was answered."""

    def __init__(self, detail: str, *, last_step: int = 0) -> None:
        super().__init__(detail)
        self.last_step = last_step


class SessionLost(GatewayError, code="session_lost", title="The session's state is lost", outcome=Outcome.MODEL_ERROR):
    """``last_step``: the number of the last step that was answered."""

    def __init__(self, detail: str, *, last_step: int = 0, hint: str | None = None) -> None:
        super().__init__(detail, hint=hint)
        self.last_step = last_step
