"""Makes the tables of measurements in README.md and docs/ from the committed CSVs: `python -m benchmarks.tables`.

Each file makes the tables of one or two CSVs. In a document, a table stands between <!-- NAME --> and <!-- end of NAME
-->.
"""
