"""What compute nodes say of themselves, asked by tiny jobs."""
