"""Each direct task beside its loop, supervision and its cheap rivals; see README.md."""
