"""Pipelines for the early-exit tests: the same rules for each way of composing a scripted step."""

from typing import Any

EARLY_EXIT_KEY = "the key of tests"
"""The key of the scripted models' signatures, unless the environment of Triton sets another key."""
MARKER = "EARLY_EXIT[nothing]"
PATTERN = r"EARLY_EXIT\[blank\] page=\d+"
REASONS_BY_ERROR = {
    "exact": ({"message": MARKER}, "nothing"),
    "pattern": ({"message": "EARLY_EXIT[blank] page=12"}, "blank"),
    "signed": ({"signed": "proven"}, "proven"),
}
UNARY = ("scripted", "scripted_chain", "scripted_nested", "scripted_bls")
STREAMED = ("scripted_stream", "stream_chain", "stream_nested")


def pipelines(reference: dict[str, Any]) -> dict[str, Any]:
    """Returns the scripted pipelines and the OCR pipelines of ``reference``, with longer timeouts.

    Args:
        reference: the pipelines of the reference ``gateway.yaml``.
    """
    inputs = {"script": {"tensor": "SCRIPT", "kind": "text"}}
    text = {"tensor": "TEXT", "kind": "text"}
    unary = {"outputs": {"text": text, "numbers": {"tensor": "NUMBERS"}}, "stream": True}
    unary["early_exit"] = rules("ALREADY_EXISTS", text="TEXT", list_="NUMBERS")
    streamed = {"outputs": {"text": text, "token_id": {"tensor": "TOKEN_ID"}}, "stream": {"commit_s": 0.3}}
    streamed["early_exit"] = rules("any", text="TEXT", list_="TOKEN_ID")
    batch = {"outputs": {"text": text, "together": {"tensor": "TOGETHER"}}}
    batch["early_exit"] = rules("ALREADY_EXISTS", text="TEXT", list_="TOGETHER")
    by_model = {**dict.fromkeys(UNARY, unary), **dict.fromkeys(STREAMED, streamed), "scripted_batch": batch}
    scripted = {name: {"model": name, "inputs": inputs, "timeout_s": 20, **spec} for name, spec in by_model.items()}
    ocr = {name: reference[name] | {"timeout_s": 60} for name in ("ocr", "ocr_bls")}
    return scripted | {name: {key: spec[key] for key in spec if key != "sample"} for name, spec in ocr.items()}


def rules(code: str, *, text: str, list_: str) -> list[dict[str, Any]]:
    return [
        {"reason": "nothing", "error": {"code": code, "message": MARKER}},
        {"reason": "blank", "error": {"code": code, "message_pattern": PATTERN}},
        {"reason": "proven", "error": {"code": "any", "signed": True}},
        {"reason": "no_text", "missing": [text]},
        {"reason": "no_items", "empty": [list_]},
    ]
