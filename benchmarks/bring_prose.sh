#!/usr/bin/env bash
# English prose for `python -m benchmarks.training --text OUT/*.txt`, 93 MB, out of Debian's packages: a dictionary with
# its quotations, essays, manuals of Linux, Python and Perl.
#
#     bash benchmarks/bring_prose.sh OUT        needs Debian's apt-get and dpkg; Debian 12 gave what was measured
set -euo pipefail

mkdir -p "${1:?usage: bash bring_prose.sh OUT}"
out=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
apt-get download dict-gcide anarchism linux-doc-6.1 python3.11-doc perl-doc
for package in *.deb; do dpkg -x "$package" files; done

joined() { find files -path "$1" ! -path '*/translations/*' -print0 | sort -z; }  # of a pattern's files, by name
zcat < files/usr/share/dictd/gcide.dict.dz > "$out/gcide.txt"
joined '*/anarchism/markdown/*.md.gz' | xargs -0 zcat > "$out/anarchism.txt"
joined '*/linux-doc-6.1/html/_sources/*.rst.txt' | xargs -0 cat > "$out/linux-doc.txt"
joined '*/python3.11/html/_sources/*.rst.txt' | xargs -0 cat > "$out/python-doc.txt"
joined '*.pod' | xargs -0 cat > "$out/perl-doc.txt"
