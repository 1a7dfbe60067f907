"""Pictures and pages from numbers: charts as SVG, the report of a training as one HTML file, without other packages."""
