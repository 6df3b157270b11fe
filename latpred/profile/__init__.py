"""Device profiles: the document, its codec, the store on disk, datasheets, and hosts."""
