// For programs whose sandbox may be forked: no two forks draw the same random numbers. Load it first:
// NODE_OPTIONS=--require=/run/warren/lib/node/warren-fork.cjs
//
// A fork copies memory, and with it the state of every generator. Math.random becomes a generator that takes a new seed
// from the kernel whenever it is used in another millisecond than before; a restore takes longer, so that the first number
// after it is a fork's own. The random functions of node:crypto and of Web Crypto read from the kernel each time: those
// of OpenSSL would go on alike in all forks for up to an hour. What OpenSSL draws by itself, for keys that it generates and
// for TLS, is out of reach from here.
'use strict';
const fs = require('node:fs');
const crypto = require('node:crypto');

const kernel = fs.openSync('/dev/urandom', 'r');
function fill(view) {
  for (let at = 0; at < view.length;) at += fs.readSync(kernel, view, at, view.length - at);
  return view;
}

// xoshiro128**
const s = new Uint32Array(4);
const seed = new Uint8Array(s.buffer);
let last = -1;
function next() {
  const r = Math.imul(s[1], 5);
  const out = Math.imul((r << 7) | (r >>> 25), 9) >>> 0;
  const t = s[1] << 9;
  s[2] ^= s[0]; s[3] ^= s[1]; s[1] ^= s[2]; s[0] ^= s[3]; s[2] ^= t;
  s[3] = (s[3] << 11) | (s[3] >>> 21);
  return out;
}
Math.random = function random() {
  const now = Date.now();
  if (now !== last) {
    last = now;
    fill(seed);
    s[0] |= 1; // never all zero
  }
  return (next() >>> 5) * 2 ** -27 + (next() >>> 5) * 2 ** -54;
};

const bytesOf = (b) => ArrayBuffer.isView(b) ? new Uint8Array(b.buffer, b.byteOffset, b.byteLength) : new Uint8Array(b);
// The originals check arguments, and throw as their callers expect.
const original = { randomBytes: crypto.randomBytes, randomFillSync: crypto.randomFillSync, randomFill: crypto.randomFill,
  randomInt: crypto.randomInt, randomUUID: crypto.randomUUID };
function later(callback, value) { setImmediate(callback, null, value); }

crypto.randomBytes = function randomBytes(size, callback) {
  if (callback !== undefined && typeof callback !== 'function') return original.randomBytes(size, callback);
  const buf = original.randomBytes(size);
  fill(buf);
  return callback ? later(callback, buf) : buf;
};
crypto.pseudoRandomBytes = crypto.prng = crypto.rng = crypto.randomBytes;
function part(buf, offset, size) {
  const unit = buf.BYTES_PER_ELEMENT || 1;
  const all = bytesOf(buf);
  const from = offset === undefined ? 0 : offset * unit;
  return all.subarray(from, size === undefined ? all.length : from + size * unit);
}
crypto.randomFillSync = function randomFillSync(buf, offset, size) {
  original.randomFillSync(buf, offset, size);
  fill(part(buf, offset, size));
  return buf;
};
crypto.randomFill = function randomFill(buf, offset, size, callback) {
  if (typeof offset === 'function') { callback = offset; offset = size = undefined; }
  else if (typeof size === 'function') { callback = size; size = undefined; }
  if (typeof callback !== 'function') return original.randomFill(buf, offset, size, callback);
  crypto.randomFillSync(buf, offset, size);
  later(callback, buf);
};
crypto.randomInt = function randomInt(min, max, callback) {
  if (max === undefined || typeof max === 'function') { callback = max; max = min; min = 0; }
  original.randomInt(min, max);
  const range = max - min;
  const limit = 2 ** 48 - (2 ** 48 % range);
  const b = Buffer.alloc(6);
  let n;
  do n = fill(b).readUIntBE(0, 6); while (n >= limit);
  n = min + (n % range);
  return callback ? later(callback, n) : n;
};
crypto.randomUUID = function randomUUID(options) {
  original.randomUUID(options);
  const b = fill(Buffer.alloc(16));
  b[6] = (b[6] & 0x0f) | 0x40;
  b[8] = (b[8] & 0x3f) | 0x80;
  const h = b.toString('hex');
  return `${h.slice(0, 8)}-${h.slice(8, 12)}-${h.slice(12, 16)}-${h.slice(16, 20)}-${h.slice(20)}`;
};
const web = crypto.webcrypto;
const values = Object.getPrototypeOf(web).getRandomValues;
Object.defineProperty(Object.getPrototypeOf(web), 'getRandomValues', { configurable: true, enumerable: true, writable: true,
  value: function getRandomValues(array) {
    values.call(this, array);
    fill(bytesOf(array));
    return array;
  } });
Object.defineProperty(Object.getPrototypeOf(web), 'randomUUID', { configurable: true, enumerable: true, writable: true,
  value: function randomUUID() { return crypto.randomUUID(); } });
require('node:module').syncBuiltinESMExports();
