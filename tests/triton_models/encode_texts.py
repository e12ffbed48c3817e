"""Run by the models' own Python: the vectors of the JSON texts on standard input, one at a time and all at once."""

import json
import sys

from model_kit.sentence_encoder import SentenceEncoder


def main():
    encoder = SentenceEncoder()
    texts = json.load(sys.stdin)
    alone = [encoder.vectors_of([text])[0].tolist() for text in texts]
    json.dump({"alone": alone, "together": encoder.vectors_of(texts).tolist()}, sys.stdout)


if __name__ == "__main__":
    main()
