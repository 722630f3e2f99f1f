"""One of the processes that decode images for a cache."""

import os
import sys

from fedssl.data.image_cache.decoders import serve

if __name__ == "__main__":
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a decoder prints must not be mistaken for an answer
    try:
        serve(sys.stdin.buffer, answers)
    except BrokenPipeError:
        os._exit(1)  # the process that asked has ended
