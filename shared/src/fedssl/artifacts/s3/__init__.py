"""The artifact store in an object store that speaks S3. Needs boto3: the extra `s3`."""
