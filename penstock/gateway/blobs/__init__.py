"""The bytes of files and of batches: in a folder, or in a bucket of an object store."""
