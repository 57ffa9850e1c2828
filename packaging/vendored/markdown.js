// markdown-it without what writes HTML entities. `python packaging/vendored/build.py` makes markdown-it.min.js.
import MarkdownIt from "markdown-it";

globalThis.markdownit = (options) => new MarkdownIt(options);
