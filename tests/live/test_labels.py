"""Accuracy of the two heads on sentences that did not influence the examples in their ``labels.json``."""

import httpx
import pytest

TOPIC_BY_TEXT = {
    "The prime minister resigned after losing a confidence vote.": "politics",
    "The start-up raised ten million from investors.": "business",
    "The goalkeeper saved a penalty in extra time.": "sport",
    "Our laptop now ships with twice the memory.": "technology",
    "The fossil is two hundred million years old.": "science",
    "Sleep helps the immune system.": "health",
    "You need a visa to cross the border by train.": "travel",
    "Add the flour and knead the dough.": "food",
    "The comedy opens in cinemas on Friday.": "entertainment",
}
SENTIMENT_BY_TEXT = {
    "Best purchase I have made this year.": "positive",
    "The room was spotless and the view was stunning.": "positive",
    "Support answered within minutes, thanks a lot!": "positive",
    "A complete waste of time.": "negative",
    "The screen cracked on the first day and nobody helped.": "negative",
    "Too loud, too expensive and dirty.": "negative",
    "The bus runs every ten minutes.": "neutral",
    "The form is on page three.": "neutral",
    "She was born in 1970.": "neutral",
}


@pytest.mark.parametrize(
    ("label", "label_by_text", "minimum_correct"), [("topic", TOPIC_BY_TEXT, 8), ("sentiment", SENTIMENT_BY_TEXT, 9)]
)
def test_most_labels_are_correct(
    client: httpx.Client, label: str, label_by_text: dict[str, str], minimum_correct: int
) -> None:
    answers = [client.post(f"/v1/pipelines/insights_{label}", json={"text": text}).json() for text in label_by_text]
    correct = sum(answer[label] == expected for answer, expected in zip(answers, label_by_text.values(), strict=True))
    assert correct >= minimum_correct
