"""Where artifacts are: files and folders on a disk that appear whole, and object stores."""
