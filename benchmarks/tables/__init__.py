"""Tables of measurements in README.md and docs/, made of the committed CSVs: `python -m benchmarks.tables`.

A file makes those of one CSV or two. A document has a table between <!-- NAME --> and <!-- end of NAME -->.
"""
