/** Runs in the audio thread: posts the first channel as 16-bit PCM of 16 kHz, 96 ms at a time. */

const RATE_HZ = 16000;
const CHUNK_SAMPLES = 1536;

class Pcm extends AudioWorkletProcessor {
  #ratio = sampleRate / RATE_HZ;
  #chunk = new Int16Array(CHUNK_SAMPLES);
  #filled = 0;
  #sum = 0;
  #covered = 0;

  process([[samples = []]]) {
    for (const sample of samples) this.#add(sample);
    return true;
  }

  /** Each sample of the chunk is the mean of the samples of the device that it covers, with their shares. */
  #add(sample) {
    let left = 1;
    while (this.#covered + left >= this.#ratio) {
      const share = this.#ratio - this.#covered;
      this.#put((this.#sum + sample * share) / this.#ratio);
      [this.#sum, this.#covered] = [0, 0];
      left -= share;
    }
    this.#sum += sample * left;
    this.#covered += left;
  }

  #put(level) {
    this.#chunk[this.#filled] = Math.max(-1, Math.min(1, level)) * 32767;
    this.#filled += 1;
    if (this.#filled < CHUNK_SAMPLES) return;
    this.port.postMessage(this.#chunk.slice());
    this.#filled = 0;
  }
}

registerProcessor("pcm", Pcm);
