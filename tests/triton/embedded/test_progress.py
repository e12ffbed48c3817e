import io

from rich.console import Console

from app.triton.embedded.server import Loading, changes_only, shown_on


def test_progress_as_text():
    assert str(Loading(3, 8, "ocr_ensemble")) == "3 of 8 models ready: ocr_ensemble"
    assert str(Loading(0, 8)) == "0 of 8 models ready"


def test_the_same_progress_is_reported_once():
    reported = []
    on_progress = changes_only(reported.append)
    for loading in (Loading(0, 2), Loading(0, 2), Loading(1, 2, "a"), Loading(1, 2, "a")):
        on_progress(loading)
    assert reported == [Loading(0, 2), Loading(1, 2, "a")]


def test_a_pipe_gets_plain_lines():
    lines: list[str] = []
    with shown_on(Console(file=io.StringIO()), lines.append) as on_progress:
        on_progress(Loading(1, 2, "a"))
    assert lines == ["Triton: 1 of 2 models ready: a"]


def test_a_terminal_gets_a_progress_bar():
    written = io.StringIO()
    with shown_on(Console(file=written, force_terminal=True, width=100), print) as on_progress:
        on_progress(Loading(1, 2, "a"))
    assert "1 of 2 models ready: a" in written.getvalue()
