# A Linux with everything poise needs to build, CPU only, for people on macOS and Windows:
#   docker build -t poise . && docker run --rm -it -v "$PWD:/poise" poise make demo
# For the smaller CPU wheel of torch add --build-arg TORCH_INDEX=<index of CPU wheels>.
# The container has not been built by the project's own tests, which run outside of any.
FROM debian:bookworm
ARG TORCH_INDEX=
RUN apt-get update && apt-get install -y --no-install-recommends \
      ca-certificates git make python3 python3-venv python3-dev && rm -rf /var/lib/apt/lists/*
# Only what the set-up reads, so that the layer is kept when sources change.
WORKDIR /opt/poise-setup
COPY setup setup
COPY cmake/torch.cmake cmake/torch.cmake
RUN YES=1 TORCH_INDEX="$TORCH_INDEX" setup/prepare.sh
# The active environment: the makefile in the mounted folder finds its torch and uses it.
ENV VIRTUAL_ENV=/opt/poise-setup/.venv PATH=/opt/poise-setup/.venv/bin:$PATH
WORKDIR /poise
CMD ["bash"]
