"""The models that the script calls, and the fixed texts of their errors for invalid input."""

from collections.abc import Collection
from dataclasses import dataclass

from model_kit.zero_shot import FAULTS


@dataclass(frozen=True)
class Head:
    model: str
    labels: str
    outputs: tuple[str, ...]
    faults: Collection[str] = FAULTS


HEADS = (
    Head("head_topic", "TOPICS", ("TOPIC", "TOPIC_SCORES")),
    Head("head_sentiment", "SENTIMENTS", ("SENTIMENT", "SENTIMENT_SCORES")),
)
