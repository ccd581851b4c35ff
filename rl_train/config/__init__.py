"""Every flag, declared once, as small frozen dataclasses."""
