"""Encodes the JSON texts of standard input, one by one and together. The Python of the models runs this script."""

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
