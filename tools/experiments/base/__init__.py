"""The lab's base: a small Sa2VA of random weights, taught few captions, and what it knows."""
