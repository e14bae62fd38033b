"""Charts as SVG inside HTML, drawn here: no script, no library, nothing fetched."""
