# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""How the page looks: the style of the players, in the colors of the theme of Gradio."""

STYLE = """
.gradio-container { max-width: 1080px !important; width: 100%; margin: 0 auto !important; }
#d3pm-title h1 { font-size: 1.55rem; margin: .2rem 0 0; letter-spacing: -.01em; }
#d3pm-title p { color: var(--body-text-color); opacity: .7; margin: .25rem 0 0; }
#d3pm-title a, .d3pm-about a { padding: 0; margin: 0; }
.d3pm-about { color: var(--body-text-color); opacity: .7; font-size: .85rem; margin: 0; }
#about { background: var(--block-background-fill); padding: 0 var(--block-padding) .5rem !important; }
.d3pm-player { display: flex; flex-direction: column; gap: .8rem; min-width: 0; }
.d3pm-bar { display: flex; align-items: center; gap: .75rem; }
.d3pm-bar button { width: 2.4rem; height: 2.4rem; flex: none; border-radius: 50%; color: white; font-size: .85rem;
  background: var(--button-primary-background-fill, #4f46e5); cursor: pointer; }
.d3pm-bar input { flex: 1; min-width: 0; accent-color: #4f46e5; }
.d3pm-bar output { min-width: 7.5rem; text-align: right; font-variant-numeric: tabular-nums; font-size: .9rem; }
.d3pm-panels { display: flex; flex-wrap: wrap; gap: 1rem 1.5rem; align-items: flex-start; }
.d3pm-panels figure { margin: 0; flex: 0 1 auto; min-width: 0; max-width: 100%; }
.d3pm-panels figure:has(.d3pm-frames) { flex: 1 1 300px; }
.d3pm-panels figure.d3pm-wide { flex: 1 1 22rem; }
.d3pm-panels figcaption { font-size: .85rem; font-weight: 600; margin-bottom: .35rem; }
.d3pm-label { font-weight: 400; color: var(--body-text-color); opacity: .7; font-variant-numeric: tabular-nums; }
.d3pm-text { font: 1.02rem/1.85 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; margin: 0; padding: .7rem .9rem;
  border: 1px solid var(--border-color-primary); border-radius: .6rem; background: var(--background-fill-primary);
  white-space: pre-wrap; overflow-wrap: anywhere; }
.d3pm-text > span { display: inline-block; max-width: 100%; }
.d3pm-text span span { border-radius: .22em; padding: .12em 0; color: var(--body-text-color); transition: background-color .2s; }
.d3pm-text span.mask { color: #b3b3c0; }
.d3pm-text span.written { background: hsl(calc(255 - 225 * var(--age)) 85% 62% / .3); }
.d3pm-text span.new { background: hsl(calc(255 - 225 * var(--age)) 90% 55% / .75); font-weight: 700; }
.d3pm-frames { image-rendering: pixelated; border-radius: .35rem; background-repeat: no-repeat; }
.d3pm-axes { display: grid; grid-template-columns: max-content minmax(0, var(--side));
  font: var(--sign)/1 ui-monospace, "DejaVu Sans Mono", monospace; gap: 3px 4px; }
.d3pm-axes > div:nth-child(2), .d3pm-axes > div:nth-child(3) { display: flex; opacity: .7; }
.d3pm-axes > div:nth-child(3) { flex-direction: column; }
.d3pm-axes > div > span { flex: 1 1 0; display: flex; align-items: center; justify-content: center; min-width: 0; min-height: 0;
  overflow: hidden; }
.d3pm-status { color: var(--body-text-color); opacity: .7; font-size: .85rem; margin: 0; font-variant-numeric: tabular-nums; }
.d3pm-error { border-left: 4px solid #dc2626; background: rgb(220 38 38 / .1); color: var(--body-text-color); margin: 0;
  padding: .7rem .9rem; border-radius: .3rem; overflow-wrap: anywhere; }
.d3pm-rows { display: flex; flex-direction: column; gap: .3rem; }
.d3pm-ticks { display: flex; gap: .75rem; align-items: center; font-size: .85rem; }
.d3pm-ticks > span { width: 4.5rem; flex: none; }
.d3pm-ticks > div { position: relative; flex: 1; height: 1.1rem; border-bottom: 1px solid var(--border-color-primary); }
.d3pm-ticks i { position: absolute; width: 2px; height: 100%; background: #4f46e5; border-radius: 1px; }
.d3pm-ends > div { border: 0; display: flex; justify-content: space-between; }
.d3pm-ends b { font-weight: 400; color: var(--body-text-color); opacity: .7; }
.d3pm-scale { display: inline-block; width: 6rem; height: .7rem; border-radius: .2rem; vertical-align: -1px; }
.dark .d3pm-text span.mask { color: #6d6d7d; }
@media (max-width: 640px) {
  .gradio-container { padding: .5rem !important; }
  .d3pm-bar output { min-width: 5.5rem; font-size: .8rem; }
  .d3pm-text { font-size: .95rem; padding: .55rem .6rem; }
}
"""
