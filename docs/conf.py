# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Settings of Sphinx for the pages that build_site.py prepares, and what makes them complete without a network."""

import html
import json
import re
from pathlib import Path

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

from d3pm_hf import __version__


project = "d3pm-hf"
author = "The d3pm-hf authors"
project_copyright = f"2026, {author}"
version = release = __version__

extensions = ["myst_parser"]
# $...$, ```math and <img>, which GitHub renders too.
myst_enable_extensions = ["colon_fence", "dollarmath", "html_image"]
myst_fence_as_directive = ["math"]
# GitHub's anchors, by which the pages link to each other.
myst_heading_anchors = 4

html_theme = "furo"
html_title = "d3pm-hf"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sourcelink = False
# A long signature has one argument per line.
python_maximum_signature_line_length = 88
# `D3PMScheduler`, not `d3pm_hf.D3PMScheduler`.
add_module_names = False
# Headings name the objects already.
toc_object_entries = False


def visit_math(translator, node) -> None:
    """Writes a formula as MathML, which browsers render without scripts and fonts of other servers."""
    # docutils sets the index of a letter with an accent below the letter.
    text = re.sub(r"(\\(?:bar|hat|tilde)\{\w+\})(?=[_^])", r"\1{}", node.astext())
    try:
        formula = tex2mathml(text, as_block=isinstance(node, nodes.math_block))
    except MathError as error:
        logging.getLogger(__name__).warning(f"{node.astext()}: {error}", location=node)
        raise nodes.SkipNode from error
    # Browsers leave no room after log and exp for the invisible sign of a function.
    translator.body.append(formula.replace("<mo>&ApplyFunction;</mo>", '<mspace width="0.17em"/>'))
    raise nodes.SkipNode


def keep_text(app, name, template, context, doctree) -> None:
    """Keeps the text of a page for the excerpts of the search."""
    if doctree is not None:
        text = re.sub(r"<(script|style)\b.*?</\1>", " ", context["body"], flags=re.DOTALL)
        # Tags inside of a line, such as the colors of code and the parts of a formula, leave no space behind.
        text = re.sub(r"</?(?:a|code|em|m\w+|span|strong)\b[^>]*>", "", text)
        text = re.sub(r"<[^>]*>", " ", text)
        app.env.page_texts[name] = " ".join(html.unescape(text).replace("¶", "").split())


def write_texts(app, exception) -> None:
    """Writes the texts as a script, because browsers do not let a page on disk fetch another one."""
    Path(app.outdir, "_static", "page_texts.js").write_text(f"const PAGE_TEXTS = {json.dumps(app.env.page_texts)};\n")


def add_texts(app, name, template, context, doctree) -> None:
    """Loads the texts on the page of the search alone."""
    if name == "search":
        app.add_js_file("page_texts.js")


def setup(app) -> None:
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.connect("builder-inited", lambda app: setattr(app.env, "page_texts", {}))
    app.connect("html-page-context", keep_text)
    app.connect("html-page-context", add_texts)
    app.connect("build-finished", write_texts)
