# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Settings of Sphinx for the pages that build_site.py prepares."""

from d3pm_hf import __version__


project = "d3pm-hf"
author = "The d3pm-hf authors"
project_copyright = f"2026, {author}"
version = release = __version__

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
# GitHub's anchors, by which the pages link to each other.
myst_heading_anchors = 4

html_theme = "furo"
html_title = "d3pm-hf"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
# A long signature has one argument per line.
python_maximum_signature_line_length = 88
# `D3PMScheduler`, not `d3pm_hf.D3PMScheduler`.
add_module_names = False
# Headings name the objects already.
toc_object_entries = False
