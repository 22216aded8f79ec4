# The DynamoDB table of airflow-dynamo-lock, and IAM policies for the roles of workers and triggerers.

terraform {
  required_version = ">= 1.3"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.0"
    }
  }
}

variable "table_name" {
  type    = string
  default = "airflow_locks"
}

variable "streams" {
  description = "Enable the table's DynamoDB stream, for faster hand-over of locks."
  type        = bool
  default     = false
}

variable "point_in_time_recovery" {
  description = "Enable point-in-time recovery. Locks do not need it. See 'After a restore' in docs/installing.md."
  type        = bool
  default     = false
}

resource "aws_dynamodb_table" "locks" {
  name                        = var.table_name
  billing_mode                = "PAY_PER_REQUEST"
  hash_key                    = "key"
  range_key                   = "entry"
  stream_enabled              = var.streams
  stream_view_type            = var.streams ? "KEYS_ONLY" : null
  deletion_protection_enabled = true

  attribute {
    name = "key"
    type = "S"
  }

  attribute {
    name = "entry"
    type = "S"
  }

  ttl {
    attribute_name = "expires_at"
    enabled        = true
  }

  point_in_time_recovery {
    enabled = var.point_in_time_recovery
  }
}

data "aws_iam_policy_document" "holder" {
  statement {
    actions = [
      "dynamodb:UpdateItem",
      "dynamodb:PutItem",
      "dynamodb:DeleteItem",
      "dynamodb:GetItem",
      "dynamodb:BatchGetItem",
      "dynamodb:Query",
    ]
    resources = [aws_dynamodb_table.locks.arn]
  }
}

data "aws_iam_policy_document" "stream_reader" {
  statement {
    actions   = ["dynamodb:DescribeTable"]
    resources = [aws_dynamodb_table.locks.arn]
  }

  statement {
    actions   = ["dynamodb:DescribeStream", "dynamodb:GetShardIterator", "dynamodb:GetRecords"]
    resources = ["${aws_dynamodb_table.locks.arn}/stream/*"]
  }
}

resource "aws_iam_policy" "holder" {
  name_prefix = "${var.table_name}-holder-"
  description = "Wait for locks, take them, keep them and release them."
  policy      = data.aws_iam_policy_document.holder.json
}

resource "aws_iam_policy" "stream_reader" {
  count = var.streams ? 1 : 0

  name_prefix = "${var.table_name}-stream-reader-"
  description = "Read the lock table's stream. Attach it to triggerers, beside the holder's policy."
  policy      = data.aws_iam_policy_document.stream_reader.json
}

output "table_arn" {
  value = aws_dynamodb_table.locks.arn
}

output "holder_policy_arn" {
  value = aws_iam_policy.holder.arn
}

output "stream_reader_policy_arn" {
  value = one(aws_iam_policy.stream_reader[*].arn)
}
