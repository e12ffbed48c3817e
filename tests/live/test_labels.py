"""Accuracy of the two heads on sentences that did not influence the examples in their ``labels.json``."""

import httpx
import pytest

TOPIC_BY_TEXT = {
    "The prime minister resigned after losing a confidence vote.": "politics",
    "The mayor wants to raise the city's parking fees.": "politics",
    "The start-up raised ten million from investors.": "business",
    "Retail sales dropped in December.": "business",
    "The goalkeeper saved a penalty in extra time.": "sport",
    "Rain stopped play at the tennis final.": "sport",
    "Our laptop now ships with twice the memory.": "technology",
    "The browser blocks third-party cookies.": "technology",
    "The fossil is two hundred million years old.": "science",
    "A telescope took a picture of a black hole.": "science",
    "Sleep helps the immune system.": "health",
    "The clinic offers free flu shots.": "health",
    "You need a visa to cross the border by train.": "travel",
    "The museum island is worth a day of your city break.": "travel",
    "Add the flour and knead the dough.": "food",
    "The curry was spicy and came with fresh naan.": "food",
    "The comedy opens in cinemas on Friday.": "entertainment",
    "Season two of the series ends with a cliffhanger.": "entertainment",
}
SENTIMENT_BY_TEXT = {
    "Best purchase I have made this year.": "positive",
    "The room was spotless and the view was stunning.": "positive",
    "Support answered within minutes, thanks a lot!": "positive",
    "Everyone enjoyed the evening.": "positive",
    "It works perfectly.": "positive",
    "A complete waste of time.": "negative",
    "The screen cracked on the first day and nobody helped.": "negative",
    "Too loud, too expensive and dirty.": "negative",
    "I regret buying this.": "negative",
    "The seller lied to me.": "negative",
    "The bus runs every ten minutes.": "neutral",
    "The form is on page three.": "neutral",
    "She was born in 1970.": "neutral",
    "The table is made of wood.": "neutral",
    "The office is on the second floor.": "neutral",
}


@pytest.mark.parametrize(
    ("label", "label_by_text", "minimum_correct"), [("topic", TOPIC_BY_TEXT, 16), ("sentiment", SENTIMENT_BY_TEXT, 15)]
)
def test_most_labels_are_correct(
    client: httpx.Client, label: str, label_by_text: dict[str, str], minimum_correct: int
) -> None:
    answers = [client.post(f"/v1/pipelines/insights_{label}", json={"text": text}).json() for text in label_by_text]
    correct = sum(answer[label] == expected for answer, expected in zip(answers, label_by_text.values(), strict=True))
    assert correct >= minimum_correct
