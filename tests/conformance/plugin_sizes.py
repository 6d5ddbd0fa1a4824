"""Sizes of the step that plugins are asked about, by their letters in ``trtcb.plugins.schema``."""

T, S, B, MB, SLOTS = 2048, 512, 16, 128, 65536
