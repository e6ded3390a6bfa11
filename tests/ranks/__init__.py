"""Scripts that tests start on several processes; `launch` starts them."""
