# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Checks of arguments, atomic writes, class lookup and entry points: tools without mathematics."""
