"""`helm test`: the gateway is ready, and one call of PIPELINE is answered. Standard library only."""

import os
import sys
import time
import urllib.error
import urllib.request

URL, PIPELINE, BODY = (os.environ[name] for name in ("URL", "PIPELINE", "BODY"))
HEADERS = {"Content-Type": "application/json"}
if key := os.environ.get("API_KEY"):
    HEADERS["Authorization"] = f"Bearer {key.strip()}"
WAIT_S = float(os.environ.get("WAIT_S", "90"))


def is_ready() -> bool:
    try:
        with urllib.request.urlopen(f"{URL}/health/ready", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def call() -> str:
    request = urllib.request.Request(f"{URL}/v1/pipelines/{PIPELINE}", BODY.encode(), HEADERS)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        sys.exit(f"{PIPELINE} answered {error.code}: {error.read().decode(errors='replace')}")


ends = time.monotonic() + WAIT_S
while not is_ready():
    if time.monotonic() > ends:
        sys.exit(f"{URL} did not become ready within {WAIT_S:g} s")
    time.sleep(1)
sys.stdout.write(f"{URL} is ready\n")
if PIPELINE:
    sys.stdout.write(f"{PIPELINE}: {call()}\n")
