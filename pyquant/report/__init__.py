"""Reports: plain records of results, rendered as JSON, CSV, Markdown and pictures."""
