"""For programs whose sandbox may be forked: no two forks draw the same random numbers.

A fork copies memory, and with it the state of every generator. Importing this module replaces the generator behind the
functions of module random by one that takes a new seed from the kernel whenever it is used some milliseconds after it
was used last. A restore takes longer than that, so the first number that is drawn after it is a fork's own. A program
that seeds the generator itself wants its numbers repeatable; then they are left alone.

The generators of libraries are theirs. watch() starts a thread that looks at /run/warren/generation, hands the random
generator of OpenSSL new entropy after each fork and calls what on_fork was given, such as numpy.random.seed.
"""
import os
import random
import threading
import time

GENERATION = "/run/warren/generation"
STALE = 5_000_000  # nanoseconds

_draw, _bits, _seed, _set = random.Random.random, random.Random.getrandbits, random.Random.seed, random.Random.setstate


class _Random(random.Random):
    _own = False  # seeded by the program
    _last = 0

    def seed(self, a=None, version=2):
        self._own = a is not None
        _seed(self, a, version)
        self._last = time.time_ns()

    def setstate(self, state):
        self._own = True
        _set(self, state)

    def _fresh(self):
        now = time.time_ns()
        if not 0 <= now - self._last < STALE:
            if not self._own:
                _seed(self, None)
        self._last = now

    def random(self):
        self._fresh()
        return _draw(self)

    def getrandbits(self, k):
        self._fresh()
        return _bits(self, k)


def _install():
    old, new = random._inst, _Random()
    for name, value in list(vars(random).items()):
        if getattr(value, "__self__", None) is old:
            setattr(random, name, getattr(new, name))
    random._inst = new


def generation():
    """Returns the generation of the sandbox, which is another one after each fork, resume and rollback."""
    try:
        with open(GENERATION) as f:
            return f.read().strip()
    except OSError:
        return ""


_callbacks = []
_watching = None


def on_fork(function):
    """Has function called, in a thread of its own, after each fork, resume and rollback. Returns function."""
    _callbacks.append(function)
    watch()
    return function


def watch(interval=0.1):
    """Starts the thread that sees forks, if there is none in this process yet."""
    global _watching
    if _watching is None or not _watching.is_alive():
        _watching = threading.Thread(target=_watch, args=(generation(), interval), name="warren-fork", daemon=True)
        _watching.start()


def _watch(before, interval):
    import ssl
    while True:
        time.sleep(interval)
        now = generation()
        if now in (before, ""):
            continue
        before = now
        ssl.RAND_add(os.urandom(32), 0.0)
        for function in list(_callbacks):
            try:
                function()
            except Exception:
                import traceback
                traceback.print_exc()


_install()
