# paceline and torch, for `paceline submit --on kubernetes`: docker build -t paceline .
# A CPU image: docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu -t paceline:cpu .
FROM python:3.12-slim

ARG TORCH_INDEX=https://pypi.org/simple

# hostname and getent are in the base image; a task may need a compiler for torch.compile.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
# Torch first: it changes seldom, and takes most of the image.
RUN pip install --no-cache-dir --index-url ${TORCH_INDEX} --extra-index-url https://pypi.org/simple --constraint constraints.txt torch
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt '.[data,tensorboard]' && rm -rf /src

# The user that the manifests name: runs need no more than its own folders.
RUN useradd --uid 1000 --create-home paceline && install -d -o paceline /runs
USER 1000
WORKDIR /home/paceline
ENTRYPOINT ["paceline"]
