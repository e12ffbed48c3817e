from app.launcher.server import Loading, changes_only


def test_progress_as_text():
    assert str(Loading(3, 8, "ocr_ensemble")) == "3 of 8 models ready: ocr_ensemble"
    assert str(Loading(0, 8)) == "0 of 8 models ready"


def test_the_same_progress_is_reported_once():
    reported = []
    on_progress = changes_only(reported.append)
    for loading in (Loading(0, 2), Loading(0, 2), Loading(1, 2, "a"), Loading(1, 2, "a")):
        on_progress(loading)
    assert reported == [Loading(0, 2), Loading(1, 2, "a")]
