"""Train the text model of the ``write`` pipeline and put its tokenizer, weights and test fixture in their places.

Run from anywhere, in an environment made from ``training/requirements.in``: ``python training/train.py``.
"""

import argparse
import logging
import math
import random
import time
from pathlib import Path

import corpus
import numpy as np
import torch
from network import Network, Shape
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional

END = "<|end|>"
ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "triton_models/text_tokenize/1/tokenizer.json"
WEIGHTS = ROOT / "triton_models/tokens_generate/1/weights.npz"
FIXTURE = ROOT / "tests/triton_models/fixtures/torch_logits.npz"
FIXTURE_TEXT = 'The "for" statement is used to iterate over the elements of a sequence.'
LOG = logging.getLogger("train")


def main() -> None:
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    texts = corpus.sections()
    LOG.info(
        "corpus: %d sections, %d characters, sha256 %s", len(texts), sum(map(len, texts)), corpus.fingerprint(texts)
    )
    training, held_out = corpus.split(texts)
    tokenizer = train_tokenizer(training, Shape.vocabulary)
    network = Network(Shape())
    fit(network, tokenizer, training, options)
    network.eval()
    LOG.info("held-out loss %.3f", loss_over(network, token_stream(tokenizer, held_out)))
    LOG.info("training loss %.3f", loss_over(network, token_stream(tokenizer, training)))
    save(network, tokenizer)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=8, help="crops of one window each in a step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE: any bytes can be written, and each token is a fixed run of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts in one row of token ids, each between two end tokens."""
    end = tokenizer.token_to_id(END)
    ids = [end]
    for text in texts:
        ids += [*tokenizer.encode(text).ids, end]
    return torch.tensor(ids)


def fit(network: Network, tokenizer: Tokenizer, texts: list[str], options: argparse.Namespace) -> None:
    """Crops of one window from the sections in an order that changes every epoch."""
    optimizers = _optimizers(network)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    crops = _crops(tokenizer, texts, network.shape.window, random.Random(options.seed))
    started, smoothed = time.monotonic(), math.log(network.shape.vocabulary)
    for step in range(options.steps):
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * _pace(step, options.steps)
        smoothed += 0.05 * (
            _step(network, torch.stack([next(crops) for _ in range(options.batch)]), optimizers) - smoothed
        )
        if step % 20 == 0:
            LOG.info("step %d loss %.3f (%.0f s)", step, smoothed, time.monotonic() - started)


def _crops(tokenizer: Tokenizer, texts: list[str], window: int, rng: random.Random):
    while True:
        stream = token_stream(tokenizer, rng.sample(texts, len(texts)))
        for start in range(rng.randrange(window), len(stream) - window, window):
            yield stream[start : start + window + 1]


def _optimizers(network: Network) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the embedding and the gains."""
    matrices = [p for p in network.blocks.parameters() if p.ndim == 2]
    others = [p for p in network.parameters() if not any(p is matrix for matrix in matrices)]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _pace(step: int, steps: int) -> float:
    """Share of the peak learning rate: a short rise, a plateau, then a straight fall over the last 60 %."""
    return min(1.0, (step + 1) / 30, (steps - step) / (0.6 * steps))


def _step(network: Network, batch: Tensor, optimizers: list[torch.optim.Optimizer]) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(batch[:, :-1])
    loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


@torch.no_grad()
def loss_over(network: Network, stream: Tensor) -> float:
    """Mean cross entropy in nats per token, window by window."""
    window = network.shape.window
    total = 0.0
    for start in range(0, len(stream) - 1, window):
        piece = stream[start : start + window + 1]
        total += functional.cross_entropy(network(piece[None, :-1])[0], piece[1:], reduction="sum").item()
    return total / (len(stream) - 1)


def save(network: Network, tokenizer: Tokenizer) -> None:
    for path in (TOKENIZER, WEIGHTS, FIXTURE):
        path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(TOKENIZER), pretty=False)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.half().float())
    np.savez(WEIGHTS, **weights_of(network), end_id=np.int32(tokenizer.token_to_id(END)))
    np.savez(FIXTURE, **fixture_of(network, tokenizer))
    LOG.info("%d parameters, %d bytes of weights", sum(p.numel() for p in network.parameters()), WEIGHTS.stat().st_size)


def weights_of(network: Network) -> dict[str, np.ndarray]:
    """float16 arrays by name; matrices [in, out], ready for ``x @ matrix``; the embedding [vocabulary, width]."""
    arrays = {name: p.detach().half().numpy() for name, p in network.named_parameters()}
    turned = {name: array.T.copy() if name.endswith(("_in", "_out")) else array for name, array in arrays.items()}
    return {**turned, "heads": np.int32(network.shape.heads), "window": np.int32(network.shape.window)}


@torch.no_grad()
def fixture_of(network: Network, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """What PyTorch answers to a short text and, past the window, to a repeated one: token ids and last logits."""
    short = tokenizer.encode(FIXTURE_TEXT).ids
    long = (short * (network.shape.window // len(short) + 2))[: network.shape.window + 40]
    return {
        "short_ids": np.array(short, np.int32),
        "short_logits": network(torch.tensor([short]))[0].numpy().astype(np.float32)[-3:],
        "long_ids": np.array(long, np.int32),
        "long_logits": network(torch.tensor([long]))[0].numpy().astype(np.float32)[-3:],
    }


if __name__ == "__main__":
    main()
