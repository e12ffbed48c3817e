/** Sound as 16-bit PCM of 16 kHz with one channel: from the microphone, or from a file. */

import { Problem } from "./api.js";

export const RATE_HZ = 16000;

/** As recorded: the models expect sound that the browser has not changed. */
const CONSTRAINTS = { audio: { channelCount: 1, echoCancellation: false, noiseSuppression: false, autoGainControl: false } };
const REFUSALS = {
  NotAllowedError: ["The browser does not let this page use the microphone", "Allow it beside the address of the page and start again, or use a file."],
  NotFoundError: ["There is no microphone", "Connect one and start again, or use a file."],
  NotReadableError: ["The microphone cannot be read", "Does another program use it?"],
};

/** Calls `onSamples` ten times a second, and `onEnd` if the microphone is removed. Returns a function that stops it. Raises Problem. */
export async function openMicrophone(onSamples, onEnd) {
  const stream = await grantedStream();
  const context = new AudioContext();
  const stop = () => {
    stream.getTracks().forEach((track) => track.stop());
    if (context.state !== "closed") context.close();
  };
  try {
    await context.audioWorklet.addModule("/console/sound-worklet.js");
    const pcm = new AudioWorkletNode(context, "pcm", { channelCount: 1, channelCountMode: "explicit" });
    pcm.port.onmessage = ({ data }) => onSamples(data);
    context.createMediaStreamSource(stream).connect(pcm).connect(context.destination); // it writes silence
  } catch (error) {
    stop();
    throw new Problem({ title: "The microphone cannot be read", detail: error.message });
  }
  stream.getTracks().forEach((track) => track.addEventListener("ended", onEnd));
  return stop;
}

async function grantedStream() {
  if (!navigator.mediaDevices) {
    throw new Problem({ title: "Browsers allow a microphone only over HTTPS, or at localhost", detail: "Open the console at such an address, or use a file." });
  }
  try {
    return await navigator.mediaDevices.getUserMedia(CONSTRAINTS);
  } catch (error) {
    const [title, detail] = REFUSALS[error.name] ?? ["The microphone cannot be used", error.message];
    throw new Problem({ title, detail });
  }
}

/** `content`: the bytes of a file in any format that the browser plays. Raises Problem. */
export async function samplesOf(content) {
  try {
    const sound = await new OfflineAudioContext(1, 1, RATE_HZ).decodeAudioData(content);
    const channels = Array.from({ length: sound.numberOfChannels }, (_, index) => sound.getChannelData(index));
    const mean = (index) => channels.reduce((sum, channel) => sum + channel[index], 0) / channels.length;
    return Int16Array.from({ length: sound.length }, (_, index) => Math.max(-1, Math.min(1, mean(index))) * 32767);
  } catch {
    throw new Problem({ title: "The browser cannot play this file", detail: "Choose a file with sound, such as WAV, MP3 or Ogg." });
  }
}
