// What every program has: the gateway's address and key, and the image to read.
declare const process: { argv: string[] };
declare const Buffer: { from(bytes: ArrayBuffer): { toString(encoding: string): string } };

const [, , address = "", apiKey = "", imageUrl = ""] = process.argv;

export const url = address;
export const headers = { Authorization: `Bearer ${apiKey}` };
export const image = async (): Promise<Blob> => (await fetch(imageUrl)).blob();
export const base64 = async (): Promise<string> => Buffer.from(await (await image()).arrayBuffer()).toString("base64");
