"""List the algorithms: python -m algos"""
import ast
import re
from pathlib import Path

if __name__ == "__main__":
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        title = re.split(r"\.  |[:\n]", doc)[0]
        print(f"python -m algos.{path.stem:<13}{title}")
    print("Each takes --help. The table in README.md has a command to try for each.")
