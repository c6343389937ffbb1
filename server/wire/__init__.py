"""What all APIs share on the wire: types of fields and their decoder, the error tree, and fields by an API's own names."""
