"""The artifact store in an S3-compatible object store. Needs boto3, which the extra `s3` installs."""
