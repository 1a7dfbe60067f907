"""Charts as SVG, and the report of a training as one HTML file, without other packages."""
